"""The observability stack: alarms, a dashboard, and a budget that tells."""

from __future__ import annotations

from typing import Any

from aws_cdk import aws_budgets as budgets
from constructs import Construct

from kvduplex_infra.cluster.capacity import CapacityBlock
from kvduplex_infra.cluster.model import Cluster
from kvduplex_infra.cluster.operations import Budget
from kvduplex_infra.constructs.alarms import add_alarms, add_block_warning
from kvduplex_infra.constructs.dashboard import add_dashboard
from kvduplex_infra.constructs.metrics import ClusterMetrics
from kvduplex_infra.stacks.base import ClusterStack
from kvduplex_infra.stacks.identity import IdentityStack
from kvduplex_infra.stacks.router import RouterStack

__all__ = ["ObservabilityStack"]

_Budget = budgets.CfnBudget


class ObservabilityStack(ClusterStack):
    """What operators see and are told."""

    def __init__(
        self, scope: Construct, *, cluster: Cluster, identity: IdentityStack, router: RouterStack, **kwargs: Any
    ) -> None:
        super().__init__(scope, "observability", cluster=cluster, **kwargs)
        metrics = ClusterMetrics(names=self.names, door=router.door)
        alarms = add_alarms(self, cluster=cluster, metrics=metrics, topic=identity.operators)
        add_dashboard(self, name=cluster.name, metrics=metrics, alarms=alarms)
        for role, fleet in cluster.fleets.items():
            if isinstance(fleet.capacity, CapacityBlock):
                add_block_warning(self, role=role, block=fleet.capacity, topic=identity.operators)
        if cluster.budget is not None:
            self._limit(cluster.budget)

    def _limit(self, budget: Budget) -> None:
        mails = [_Budget.SubscriberProperty(subscription_type="EMAIL", address=email) for email in budget.emails]
        _Budget(
            self,
            "Budget",
            budget=_Budget.BudgetDataProperty(
                budget_type="COST",
                time_unit="MONTHLY",
                budget_limit=_Budget.SpendProperty(amount=budget.monthly_usd, unit="USD"),
                # Counts only once the tag is activated for cost allocation (docs/deploy-aws.md).
                cost_filters={"TagKeyValue": [f"user:kvduplex:cluster${self.cluster.name}"]},
            ),
            notifications_with_subscribers=[
                _Budget.NotificationWithSubscribersProperty(
                    notification=_Budget.NotificationProperty(
                        notification_type=kind,
                        comparison_operator="GREATER_THAN",
                        threshold=percent,
                        threshold_type="PERCENTAGE",
                    ),
                    subscribers=mails,
                )
                for kind, percent in (("ACTUAL", 80), ("FORECASTED", 100))
            ],
        )
